"""Scripts as users have them: none imports trimtab."""
