"""Keeps KV pages below the device's pool: in host memory, and in files on a disk.

The radix tree remains the only index of the device's pages. A page in a lower tier has a *key*, a hash chained over all
tokens from the first one on, so lower tiers need no tree.

- **Down.** A page of the tree never changes, so it can be copied before it is evicted. The pages that the tree would
  evict next are copied, until free pages and copied pages together are half the pool. Eviction does not wait for
  copies. A copy is kept only if its page is still in the tree when the copy ends, because an evicted page may be
  overwritten at once.
- **Up.** Before a waiting sequence is admitted, the tokens after its cached prefix are looked up in the tiers. If
  copying them is faster than computing them, device pages are allocated and the sequence is parked until the copy has
  ended. Other sequences overtake it. Then the pages enter the tree as if they had just been computed, and the sequence
  is admitted as usual and finds them. So aborts, forks, preemptions and other requests for the same pages need no
  special rules. Steps do not depend on tiers.
- **Disk.** With a folder, every page that arrives in host memory is also written to a file, and pages are copied as
  soon as no sequence uses them. A lookup continues on the disk after the last page in host memory.
- **Clearing.** When the tree is cleared, all lower tiers are cleared, including copies on their way.

Copies run on separate CUDA streams. A sequence gets a page only after the host has seen the copy end. This
package handles page ids and slots of host memory; `aengine.runtime` copies the bytes on all ranks.

- `tiers`: decides what is copied next, in both directions.
- `host`: the slots of host memory.
- `disk`: the files.
- `keys`: the chained hashes.
- `speeds`: measures whether copying is faster than computing.
"""
