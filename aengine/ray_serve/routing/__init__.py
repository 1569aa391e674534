"""Routing by prefix: where a prompt's beginning is cached, unless computing it anew elsewhere is sooner. No Ray here."""
