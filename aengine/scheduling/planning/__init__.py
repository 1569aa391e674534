"""What a step carries: decodes, chunks of prompts within a budget, and runs that several sequences share."""
