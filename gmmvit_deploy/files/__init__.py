"""Write files and folders completely or not at all, and clean up what killed processes left."""
