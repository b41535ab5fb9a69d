"""What adapters of engines have in common; plugins of third parties may use it, too."""
