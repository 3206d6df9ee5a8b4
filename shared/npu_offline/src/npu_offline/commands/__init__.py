"""The commands of `npu-offline`, one module each: arguments, and what is printed."""
