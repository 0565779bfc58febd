"""Video tools: files that are prepared once for each video, workers that decode, and models that are asked."""
