"""GLM-5.2 (`glm_moe_dsa`): latent attention over an indexer's selection, and experts."""
