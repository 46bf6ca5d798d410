"""The exposed wait of a training loop over a link that is ten times too slow.

A loop consumes 100 MB/s: batches of 4 MB, 40 ms each. Its store is nginx in another network
namespace, behind a link of 10 MB/s (``tc tbf``). The loop sleeps for a step, as it does while a
GPU computes. Each loader delivers from the same samples of 256 KiB, with the same bound on its
local disk, a quarter of the data:

- growcache, while its cache grows, while it turns over, while the link is down for a minute, and
  with its service stopped, which shows what of the wait is not the link's;
- MosaicML Streaming and LitData over converted shards, insitubatch over a Zarr array of the same
  samples, and torch's DataLoader that gets an object per sample, while the link is up and while
  it is down.

``waiting`` is the share of the time that the loop waited for a batch. It needs root, for the
namespaces, and nginx.
"""
