"""What training and inference both compute with."""
