"""What a checkpoint says about images: sizes, values of pixels, tokens in prompts, and the shape of its tower."""
