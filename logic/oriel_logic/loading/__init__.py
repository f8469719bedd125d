"""Loading of handlers from services folders: listing, import and settings."""
