"""How units are split over tensor-parallel ranks, and what to do when one of them slows down."""
