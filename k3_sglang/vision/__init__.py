"""K3's eyes: images to patches, patches to features that stand in the place of placeholder tokens."""
