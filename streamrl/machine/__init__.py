"""What the machine at hand computes well: its CPU, a probe of its products, and the type that follows."""
