// In place of torch_npu's: its other headers include these declarations of all operators, and use none.
