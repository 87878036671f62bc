"""Pictures of masks, embeddings and attention.  The face: `mask_report` and `attention_report`."""
