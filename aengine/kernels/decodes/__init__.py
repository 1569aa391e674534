"""Two kernels of a captured step of decodes: one makes its inputs, and one verifies drafts after the draws."""
