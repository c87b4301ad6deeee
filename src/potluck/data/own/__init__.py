"""The user's own data: arrays, frames, files, and data sets of torch or Hugging Face, as one data set."""
