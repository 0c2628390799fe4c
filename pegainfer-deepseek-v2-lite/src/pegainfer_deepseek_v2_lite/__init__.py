"""The DeepSeek-V2-Lite family of pegainfer: latent attention and mixtures of experts."""
