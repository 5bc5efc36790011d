"""The inside of timm's transformers: their blocks, rules for their gradients, a record of one forward pass."""
