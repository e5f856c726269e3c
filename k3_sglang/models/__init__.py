"""Model entry classes; SGLang scans this package, so it holds entry modules and nothing else."""
