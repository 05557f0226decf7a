"""Files of other formats: safetensors as Hugging Face lays them out, torch.save, torch.distributed.checkpoint."""
