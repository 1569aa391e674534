"""What ranks compute together: sums and rows whose parts lie on several devices, or with several threads of a CPU."""
