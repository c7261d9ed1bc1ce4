"""Image corruptions after Hendrycks and Dietterich, and the reader of the published corrupted data sets.

Evaluation on corrupted data belongs in `evaluation`."""
