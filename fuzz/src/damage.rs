//! Mutations. Most bytes of a file have no meaning (a descriptor is a kilobyte of zeros), so changes of random bytes
//! have little effect; these mutations change the numbers. Half of the time, libFuzzer's own mutations are used.

use libfuzzer_sys::fuzzer_mutate;

/// Bytes before the JPEG in an input, which select a crop.
pub const FRAME_BYTES: usize = 8;
/// Length of a beton file's header, bytes.
const HEADER: usize = 24;
/// Length of a field's descriptor, bytes.
const DESCRIPTOR: usize = 1041;

/// Random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// The little-endian number of `N` bytes at `at`; 0 after the end of the bytes.
fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(bytes) = bytes.get(at..at.saturating_add(N)) {
        word[..N].copy_from_slice(bytes);
    }
    u64::from_le_bytes(word)
}

/// Damages a beton file; returns its new size.
pub fn file(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> usize {
    let mut random = Random(seed.into());
    if size < HEADER || random.below(2) == 0 {
        return fuzzer_mutate(data, size, max_size);
    }
    let mut size = size;
    for _ in 0..1 + random.below(3) {
        if size < HEADER {
            break;
        }
        size = damage_file(data, size, max_size, &mut random);
    }
    size
}

fn damage_file(data: &mut [u8], size: usize, max_size: usize, random: &mut Random) -> usize {
    let fields = number::<2>(data, 2) as usize;
    let samples = number::<8>(data, 8);
    let table = (number::<8>(data, 16) as usize).min(size);
    let rows = HEADER.saturating_add(fields.saturating_mul(DESCRIPTOR)).min(size);
    let field = HEADER + random.below(fields.min(size / DESCRIPTOR).max(1)) * DESCRIPTOR;
    let arguments = field + 17;
    // Position of a number, and its length in bytes.
    let (at, width) = match random.below(12) {
        0 => random.pick(&[(0, 2), (2, 2), (4, 4), (8, 8), (16, 8)]),
        1 => (field, 1),
        2 => (arguments + 8 * random.below(4), 8),
        3 => (arguments + 256, 8),
        4 => (arguments + 264 + random.below(24), 1),
        5..=7 => (rows + random.below(table.saturating_sub(rows)), random.pick(&[1, 2, 8])),
        8 | 9 => (table + 8 * random.below((size - table) / 8), 8),
        10 => {
            // Truncate the file, or change the length of the table.
            let size = match random.below(3) {
                0 => random.below(size),
                1 => size.saturating_sub(24),
                _ => {
                    let longer = (size + 24).min(max_size).max(size);
                    data.copy_within(size - 24..size - 24 + (longer - size), size);
                    longer
                }
            };
            return size;
        }
        _ => {
            // Set a type that needs a shape, with a shape.
            let text = b"[[\"\", \"<f4\"]]";
            if let Some(bytes) = data[..size].get_mut(field..field + 17 + 264 + text.len()) {
                bytes[0] = random.pick(&[4, 6]);
                bytes[17..].fill(0);
                bytes[17] = 1 + random.below(4) as u8;
                bytes[17 + 256] = text.len() as u8;
                bytes[17 + 264..].copy_from_slice(text);
                bytes[17 + 264 + 8] = random.pick(b"fuib");
                bytes[17 + 264 + 9] = random.pick(b"1248");
            }
            return size;
        }
    };
    let values = [
        0,
        1,
        random.below(8) as u64,
        samples,
        samples.wrapping_sub(1),
        samples.wrapping_add(1),
        size as u64,
        table as u64,
        rows as u64,
        random.below(size) as u64,
        (rows + random.below(table.saturating_sub(rows))) as u64,
        1 << random.below(64),
        (1 << random.below(63)) - 1,
        u64::MAX,
        u64::MAX - random.below(64) as u64,
        u64::from(u32::MAX),
        random.next(),
        number::<8>(data, at).wrapping_add(1),
        number::<8>(data, at).wrapping_sub(1),
        number::<8>(data, at).wrapping_add(24),
    ];
    let value = random.pick(&values).to_le_bytes();
    if let Some(bytes) = data[..size].get_mut(at..at + width) {
        bytes.copy_from_slice(&value[..width]);
    }
    size
}

/// Offsets of the markers of a JPEG's segments. The first scan is the last segment, unless another marker follows it.
fn segments(jpeg: &[u8]) -> Vec<usize> {
    let mut found = Vec::new();
    let mut at = 2;
    while at + 4 <= jpeg.len() {
        if jpeg[at] != 0xFF || matches!(jpeg[at + 1], 0 | 0xD0..=0xD7 | 0xFF) {
            at += 1;
            continue;
        }
        found.push(at);
        at += 2 + usize::from(u16::from_be_bytes([jpeg[at + 2], jpeg[at + 3]])).max(2);
    }
    found
}

fn is_frame(marker: u8) -> bool {
    matches!(marker, 0xC0..=0xCF) && !matches!(marker, 0xC4 | 0xC8 | 0xCC)
}

/// Whether a JPEG is marked as progressive, with Huffman or arithmetic coding.
#[must_use]
pub fn is_progressive(jpeg: &[u8]) -> bool {
    segments(jpeg).into_iter().any(|at| matches!(jpeg[at + 1], 0xC2 | 0xCA))
}

/// Width and height in a JPEG's header.
#[must_use]
pub fn jpeg_size(jpeg: &[u8]) -> Option<(u32, u32)> {
    let frame = segments(jpeg).into_iter().find(|at| is_frame(jpeg[at + 1]))?;
    let words = jpeg.get(frame + 5..frame + 9)?;
    let word = |at: usize| u32::from(u16::from_be_bytes([words[at], words[at + 1]]));
    Some((word(2), word(0)))
}

/// Damages a JPEG after the [`FRAME_BYTES`] that select a crop; returns the new size of the input.
pub fn jpeg(data: &mut [u8], size: usize, max_size: usize, seed: u32) -> usize {
    let mut random = Random(seed.into());
    if size < FRAME_BYTES + 4 {
        return fuzzer_mutate(data, size, max_size);
    }
    match random.below(8) {
        0 | 1 => fuzzer_mutate(data, size, max_size),
        2 => {
            // Select another part of the same image.
            for byte in &mut data[..FRAME_BYTES] {
                *byte = random.next() as u8;
            }
            size
        }
        3 => {
            FRAME_BYTES
                + fuzzer_mutate(
                    &mut data[FRAME_BYTES..],
                    size - FRAME_BYTES,
                    max_size - FRAME_BYTES,
                )
        }
        _ => {
            let mut size = size;
            for _ in 0..1 + random.below(3) {
                let jpeg = &mut data[FRAME_BYTES..];
                size = FRAME_BYTES
                    + damage_jpeg(jpeg, size - FRAME_BYTES, max_size - FRAME_BYTES, &mut random);
            }
            // Often select another part, too.
            if random.below(2) == 0 {
                let at = random.below(FRAME_BYTES);
                data[at] = random.next() as u8;
            }
            size
        }
    }
}

fn damage_jpeg(jpeg: &mut [u8], size: usize, max_size: usize, random: &mut Random) -> usize {
    let found = segments(&jpeg[..size]);
    let Some(frame) = found.iter().copied().find(|at| is_frame(jpeg[at + 1])) else {
        let at = random.below(size);
        jpeg[at] = random.next() as u8;
        return size;
    };
    let (at, value) = match random.below(10) {
        // Kind of the frame: baseline, progressive, lossless, arithmetic.
        0 => (frame + 1, random.pick(&[0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA, 0xCB])),
        // Precision, height, width, components.
        1 => (frame + 4 + random.below(6), random.pick(&[0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 64, 255])),
        // Identifier, sampling factors, table of a component.
        2 => (
            frame + 10 + random.below(9),
            random.pick(&[0x11, 0x12, 0x21, 0x22, 0x41, 0x14, 0x31, 0, 1, 2, 3]),
        ),
        3 => {
            // The same factors for all components: no subsampling, in an unusual encoding.
            let factors = random.pick(&[0x11, 0x12, 0x21, 0x22, 0x13, 0x31]);
            for component in 0..3 {
                if let Some(byte) = jpeg[..size].get_mut(frame + 11 + 3 * component) {
                    *byte = factors;
                }
            }
            return size;
        }
        // In the head of a segment, mostly of scans and tables.
        4 | 5 => (random.pick(&found) + 1 + random.below(14), random.next() as u8),
        // In coded data.
        6 => {
            (found.last().map_or(0, |last| *last + random.below(size - last)), random.next() as u8)
        }
        7 => return random.below(size).max(4),
        8 => {
            // Duplicate a segment (or scan).
            let number = random.below(found.len());
            let start = found[number];
            let end = found.get(number + 1).copied().unwrap_or(size);
            let len = end - start;
            if size + len > max_size {
                return size;
            }
            jpeg.copy_within(start..size, end);
            return size + len;
        }
        _ => {
            let number = random.below(found.len());
            let start = found[number];
            let end = found.get(number + 1).copied().unwrap_or(size);
            jpeg.copy_within(end..size, start);
            return size - (end - start);
        }
    };
    if let Some(byte) = jpeg[..size].get_mut(at) {
        *byte = value;
    }
    size
}
