//! Copying block bytes and hashing the copy, in one pass over memory.
//!
//! A block does not fit a core's caches, and is not read here again soon. An ordinary copy loads the destination's old bytes into
//! the cache before it overwrites them, and waits for each new page of the source. This one writes past the caches (non-temporal stores)
//! and prefetches the source one chunk ahead, two pages at a time. It hashes a third copy, which stays in the L1 cache, so the checksum is
//! of exactly the bytes that were written, even if the source changes meanwhile.

use std::{hash::Hasher, mem::MaybeUninit};
use twox_hash::XxHash3_64;

/// Bytes copied and hashed at a time: two pages, which fit the L1 cache together with the prefetched ones.
const CHUNK: usize = 8 << 10;
/// A cache line.
const LINE: usize = 64;

/// The copy that is hashed, on a cache line.
#[repr(align(64))]
struct Chunk(#[expect(dead_code, reason = "only its address is used")] [u8; CHUNK]);

/// Copies `len` bytes and adds them to the checksum.
///
/// # Safety
///
/// `from` is valid for reading `len` bytes and `to` for writing them, and the two do not overlap. Another process may be
/// writing `from`: the copy is then some mixture of old and new bytes, and the checksum is of that mixture.
pub(crate) unsafe fn copy_hashed(from: *const u8, to: *mut u8, len: usize, hasher: &mut XxHash3_64) {
    let head = if cfg!(target_arch = "x86_64") && len >= 2 * CHUNK { to.align_offset(LINE) } else { len };
    // SAFETY: the parts lie side by side inside the ranges that the caller vouches for; align_offset() is less than LINE
    // for bytes, which is less than len, and makes `to` a whole number of lines. SSE2 is part of x86-64.
    unsafe {
        copy_plain(from, to, head, hasher);
        #[cfg(target_arch = "x86_64")]
        copy_past_caches(from.add(head), to.add(head), len - head, hasher);
    }
}

/// Adds `len` bytes to the checksum. Each byte is read once.
///
/// # Safety
///
/// `from` is valid for reading `len` bytes. Another process may be writing them: the checksum is then of some mixture of old and new bytes.
pub(crate) unsafe fn hash_shared(from: *const u8, len: usize, hasher: &mut XxHash3_64) {
    let mut chunk = MaybeUninit::<Chunk>::uninit();
    for at in (0..len).step_by(CHUNK) {
        let hot = chunk.as_mut_ptr().cast::<u8>();
        let count = CHUNK.min(len - at);
        // SAFETY: at + count <= len and count <= CHUNK; the copy initializes what is hashed.
        unsafe {
            std::ptr::copy_nonoverlapping(from.add(at), hot, count);
            hasher.write(std::slice::from_raw_parts(hot, count));
        }
    }
}

/// [`copy_hashed`] between two slices of equal length.
pub(crate) fn copy_slice_hashed(from: &[u8], to: &mut [u8], hasher: &mut XxHash3_64) {
    assert_eq!(from.len(), to.len(), "a copy is as long as its source");
    // SAFETY: both are valid for their length, which is the same; a shared and an exclusive borrow do not overlap.
    unsafe { copy_hashed(from.as_ptr(), to.as_mut_ptr(), from.len(), hasher) }
}

/// Copies through the caches.
///
/// # Safety
///
/// The same as for [`copy_hashed`].
unsafe fn copy_plain(from: *const u8, to: *mut u8, len: usize, hasher: &mut XxHash3_64) {
    let mut chunk = MaybeUninit::<Chunk>::uninit();
    for at in (0..len).step_by(CHUNK) {
        let hot = chunk.as_mut_ptr().cast::<u8>();
        let count = CHUNK.min(len - at);
        // SAFETY: at + count <= len and count <= CHUNK; the first copy initializes what the others read.
        unsafe {
            std::ptr::copy_nonoverlapping(from.add(at), hot, count);
            std::ptr::copy_nonoverlapping(hot, to.add(at), count);
            hasher.write(std::slice::from_raw_parts(hot, count));
        }
    }
}

/// Copies past the caches; a last part of less than a chunk, through them.
///
/// # Safety
///
/// The same as for [`copy_hashed`], and `to` is at the start of a cache line.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse2")]
unsafe fn copy_past_caches(from: *const u8, to: *mut u8, len: usize, hasher: &mut XxHash3_64) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence, _mm_store_si128, _mm_stream_si128};

    let mut chunk = MaybeUninit::<Chunk>::uninit();
    let whole = len / CHUNK * CHUNK;
    for at in (0..whole).step_by(CHUNK) {
        let hot = chunk.as_mut_ptr().cast::<u8>();
        for line in (0..CHUNK / 2).step_by(LINE) {
            for page in [0, CHUNK / 2] {
                // Prefetching past the source's end has no effect.
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + CHUNK + page + line).cast());
                for part in (line..line + LINE).step_by(16) {
                    // SAFETY: page + part + 16 <= CHUNK and at + CHUNK <= len; `to` and `hot` are at the start of lines.
                    unsafe {
                        let bytes = _mm_loadu_si128(from.add(at + page + part).cast());
                        _mm_store_si128(hot.add(page + part).cast(), bytes);
                        _mm_stream_si128(to.add(at + page + part).cast(), bytes);
                    }
                }
            }
        }
        // SAFETY: all of the chunk was just written.
        hasher.write(unsafe { std::slice::from_raw_parts(hot, CHUNK) });
    }
    // Non-temporal stores are not ordered: without this, later stores could be seen before them.
    _mm_sfence();
    // SAFETY: whole <= len.
    unsafe { copy_plain(from.add(whole), to.add(whole), len - whole, hasher) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_is_copied_and_hashed_whole() {
        let source: Vec<u8> = (0..5 * CHUNK + 300).map(|i| (i * 31 + i / 256) as u8).collect();
        for len in [0, 1, 63, 64, 4096, CHUNK, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK + 77, 5 * CHUNK] {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (3, 63), (64, 64), (17, 16)] {
                let mut copy = vec![0xEE; len + 200];
                let mut hasher = XxHash3_64::new();
                // SAFETY: both are long enough, and do not overlap.
                unsafe { copy_hashed(source[from..].as_ptr(), copy[to..].as_mut_ptr(), len, &mut hasher) };
                let expected = &source[from..from + len];
                assert_eq!(&copy[to..to + len], expected, "{len} bytes, {from} to {to}");
                assert!(copy[..to].iter().chain(&copy[to + len..]).all(|&byte| byte == 0xEE), "{len} bytes, {from} to {to}");
                assert_eq!(hasher.finish(), XxHash3_64::oneshot(expected));
                let mut hasher = XxHash3_64::new();
                // SAFETY: the source is long enough.
                unsafe { hash_shared(source[from..].as_ptr(), len, &mut hasher) };
                assert_eq!(hasher.finish(), XxHash3_64::oneshot(expected));
            }
        }
    }
}
