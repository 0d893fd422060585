"""What training and inference both compute with: the model in layers, the paged cache, the acceptance rule, sampling."""
