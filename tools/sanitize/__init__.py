"""Every kernel of every package under the four tools of compute-sanitizer: `hatch run sanitize`, on a CUDA machine."""
