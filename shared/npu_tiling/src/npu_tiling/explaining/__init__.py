"""What a call of an operator does on a chip, found and put into words with neither tensors' data nor a device."""
