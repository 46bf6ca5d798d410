"""The main job, whole: the real command line, a real S3 server, real trainers."""
