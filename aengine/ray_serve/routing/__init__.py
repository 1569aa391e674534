"""Routing by prefix: to where a prompt's beginning is cached, unless computing it anew is sooner. Without Ray."""
