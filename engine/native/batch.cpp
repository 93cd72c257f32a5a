// Refuses batches that would read or write outside their tensors.
#include "context.h"

namespace ft {
namespace {

std::string of_segment(std::int64_t sequence) { return "segment " + std::to_string(sequence) + ": "; }

}  // namespace

void check_segments(const Batch& batch) {
  for (std::int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    const Segment s = segment_of(batch, sequence);
    if (s.first < 0 || s.rows < 0 || s.position < 0 || s.first + s.rows > batch.rows) {
      throw Invalid(of_segment(sequence) + "rows " + std::to_string(s.first) + " to " +
                    std::to_string(s.first + s.rows) + " at position " + std::to_string(s.position) +
                    " do not fit a batch of " + std::to_string(batch.rows) + " rows");
    }
  }
}

void check_slots(const Batch& batch, std::int64_t slots) {
  const auto check = [&](std::int64_t sequence, std::int64_t slot) {
    if (slot < 0 || slot >= slots) {
      throw Invalid(of_segment(sequence) + "state slot " + std::to_string(slot) + " is not in [0, " +
                    std::to_string(slots) + ")");
    }
  };
  for (std::int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    check(sequence, segment_of(batch, sequence).slot);
  }
  for (std::int64_t i = 0; i < batch.snapshot_count; ++i) {
    const std::int32_t* snapshot = batch.snapshots + 3 * i;
    if (snapshot[0] < 0 || snapshot[0] >= batch.sequences) {
      throw Invalid("snapshot " + std::to_string(i) + " names segment " + std::to_string(snapshot[0]) + " of " +
                    std::to_string(batch.sequences));
    }
    check(snapshot[0], snapshot[2]);
    const Segment s = segment_of(batch, snapshot[0]);
    if (snapshot[1] < 1 || snapshot[1] > s.rows) {
      throw Invalid(of_segment(snapshot[0]) + "snapshot after " + std::to_string(snapshot[1]) + " of " +
                    std::to_string(s.rows) + " rows");
    }
    for (std::int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
      if (segment_of(batch, sequence).slot == snapshot[2]) {
        throw Invalid("snapshot " + std::to_string(i) + " would overwrite the live state slot " +
                      std::to_string(snapshot[2]) + " of segment " + std::to_string(sequence));
      }
    }
  }
}

void check_pages(const Batch& batch, std::int64_t pages) {
  for (std::int64_t sequence = 0; sequence < batch.sequences; ++sequence) {
    const Segment s = segment_of(batch, sequence);
    if (s.rows == 0) continue;
    const std::int64_t needed = ceil_div(s.position + s.rows, kPage);
    if (needed > batch.pages_per_sequence) {
      throw Invalid(of_segment(sequence) + "needs " + std::to_string(needed) + " pages, the page table has " +
                    std::to_string(batch.pages_per_sequence));
    }
    for (std::int64_t page = 0; page < needed; ++page) {
      const std::int32_t physical = batch.page_table[sequence * batch.pages_per_sequence + page];
      if (physical < 0 || physical >= pages) {
        throw Invalid(of_segment(sequence) + "page " + std::to_string(page) + " is at " + std::to_string(physical) +
                      ", not in [0, " + std::to_string(pages) + ")");
      }
    }
  }
}

}  // namespace ft
