"""The machine at hand: its CPU and GPUs, how fast they compute, and the settings that follow."""
