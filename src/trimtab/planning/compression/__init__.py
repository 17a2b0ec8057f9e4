"""Whether gradients are compressed, by which route, and in how many bits per layer."""
