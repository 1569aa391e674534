"""Where KV pages lie beside the device's pool: in host memory, and in files on a disk.

How it works. The radix tree stays the one index of what the device has. A page that lies in a lower tier is known there
by its *key*, a hash chained over all tokens from the first one on, so nobody needs a tree of what is not on the device.

- **Down.** A page of the tree never changes, so it is copied *ahead* of its eviction: those that the tree would evict
  next, as many as half the pool holds, while fewer than that are free. Eviction itself stays what it is and waits for
  nothing. A copy counts only if its page is still in the tree when the copy has ended: whatever overwrites an evicted
  page may do so at once, beside a copy that nobody will look at.
- **Up.** Before a waiting sequence is admitted, its tokens are looked up behind what the tree has. Where bringing them
  is sooner than computing them, device pages are allocated, and the sequence stands aside until the copy has ended;
  others overtake it, steps go on. Then the pages enter the tree like pages that were just computed, and the sequence
  is admitted as ever: it finds them there. So an abort, a fork, a preemption or a second request for the same pages
  need no rules of their own, and neither has a step anything to do with tiers.
- **Below.** With a folder, every page that arrives in host memory is written to a file as well (then pages are copied
  as soon as nobody runs on them), and a lookup goes on where host memory has no more.
- **Dropped.** When the tree is cleared everything below is, copies on their way included.

No stream ever waits for another: copies go out on streams of their own, and the host sees them end before a page
becomes anybody's. All is said in page ids of the pool and slots of host memory; what a page holds, on how many ranks,
is known to who copies (`aengine.runtime`).

- `keys`: the chained hashes.   - `host`: the slots of host memory, least recently used first.
- `disk`: the files.            - `speeds`: what is sooner, bringing or computing.
- `tiers`: all of it together: what is to be copied next, in both directions.
"""
