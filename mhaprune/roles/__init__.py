"""What heads attend to: attention on a sentence, scores of patterns, roles."""
