"""The gallery: other people's kernels through npu-offline. `python -m tools.gallery --help` says how it is made."""
