"""Plans a step: `decodes` and the runs that they share (`sharing`), then chunks of prompts (`prefills`)."""
