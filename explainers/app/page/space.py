"""The page as a Hugging Face Space: this file is its `app.py`."""

from explainers.app.page import serve

if __name__ == "__main__":
    serve("vit_tiny_patch16_224.augreg_in21k_ft_in1k", host="0.0.0.0", domain="*")
