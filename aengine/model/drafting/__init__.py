"""Draft heads: small models that draft the next tokens from the hidden states of the target model."""
