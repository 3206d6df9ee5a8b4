"""What else of npu_embedding is measured than `embedding`."""
