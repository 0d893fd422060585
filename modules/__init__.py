"""What training and inference both compute with: the layered model, its cache, the acceptance rule, sampling."""
