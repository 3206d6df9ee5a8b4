"""Every kernel of every package under the four tools of compute-sanitizer: `hatch run cuda:sanitize`, on a CUDA machine."""
