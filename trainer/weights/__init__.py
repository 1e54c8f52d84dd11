"""Published weights (torchvision, the Hugging Face hub, any web server) and their mirror in the data root."""
