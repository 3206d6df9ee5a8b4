"""What a kernel means to Triton, without a compiler: its TTIR, executed with numpy."""
