//! Mutations. Most bytes of a file mean nothing (a descriptor is a kilobyte of zeros), so bytes changed
//! anywhere hit little; these aim at the numbers. Half of the time libFuzzer's own do their part.

use libfuzzer_sys::fuzzer_mutate;

/// What comes before a JPEG in an input: the choice of a crop.
pub const FRAME_BYTES: usize = 8;
const HEADER: usize = 24;
const DESCRIPTOR: usize = 1041;

/// splitmix64.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.roll() % bound.max(1) as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// A number of `N` bytes at `at`, little-endian; 0 where the bytes end.
fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(bytes) = bytes.get(at..at.saturating_add(N)) {
        word[..N].copy_from_slice(bytes);
    }
    u64::from_le_bytes(word)
}

/// Damages a beton file; returns its new size.
pub fn file(data: &mut [u8], size: usize, most: usize, seed: u32) -> usize {
    let mut dice = Dice(seed.into());
    if size < HEADER || dice.below(2) == 0 {
        return fuzzer_mutate(data, size, most);
    }
    let mut size = size;
    for _ in 0..1 + dice.below(3) {
        if size < HEADER {
            break;
        }
        size = damage_file(data, size, most, &mut dice);
    }
    size
}

fn damage_file(data: &mut [u8], size: usize, most: usize, dice: &mut Dice) -> usize {
    let fields = number::<2>(data, 2) as usize;
    let samples = number::<8>(data, 8);
    let table = (number::<8>(data, 16) as usize).min(size);
    let rows = HEADER.saturating_add(fields.saturating_mul(DESCRIPTOR)).min(size);
    let field = HEADER + dice.below(fields.min(size / DESCRIPTOR).max(1)) * DESCRIPTOR;
    let arguments = field + 17;
    // Where numbers stand, and how many bytes they have.
    let (at, width) = match dice.below(12) {
        0 => dice.pick(&[(0, 2), (2, 2), (4, 4), (8, 8), (16, 8)]),
        1 => (field, 1),
        2 => (arguments + 8 * dice.below(4), 8),
        3 => (arguments + 256, 8),
        4 => (arguments + 264 + dice.below(24), 1),
        5..=7 => (rows + dice.below(table.saturating_sub(rows)), dice.pick(&[1, 2, 8])),
        8 | 9 => (table + 8 * dice.below((size - table) / 8), 8),
        10 => {
            // A file cut off, or one with a table of another length.
            let size = match dice.below(3) {
                0 => dice.below(size),
                1 => size.saturating_sub(24),
                _ => {
                    let longer = (size + 24).min(most).max(size);
                    data.copy_within(size - 24..size - 24 + (longer - size), size);
                    longer
                }
            };
            return size;
        }
        _ => {
            // A type that needs a shape, with a shape.
            let text = b"[[\"\", \"<f4\"]]";
            if let Some(bytes) = data[..size].get_mut(field..field + 17 + 264 + text.len()) {
                bytes[0] = dice.pick(&[4, 6]);
                bytes[17..].fill(0);
                bytes[17] = 1 + dice.below(4) as u8;
                bytes[17 + 256] = text.len() as u8;
                bytes[17 + 264..].copy_from_slice(text);
                bytes[17 + 264 + 8] = dice.pick(b"fuib");
                bytes[17 + 264 + 9] = dice.pick(b"1248");
            }
            return size;
        }
    };
    let values = [
        0,
        1,
        dice.below(8) as u64,
        samples,
        samples.wrapping_sub(1),
        samples.wrapping_add(1),
        size as u64,
        table as u64,
        rows as u64,
        dice.below(size) as u64,
        (rows + dice.below(table.saturating_sub(rows))) as u64,
        1 << dice.below(64),
        (1 << dice.below(63)) - 1,
        u64::MAX,
        u64::MAX - dice.below(64) as u64,
        u64::from(u32::MAX),
        dice.roll(),
        number::<8>(data, at).wrapping_add(1),
        number::<8>(data, at).wrapping_sub(1),
        number::<8>(data, at).wrapping_add(24),
    ];
    let value = dice.pick(&values).to_le_bytes();
    if let Some(bytes) = data[..size].get_mut(at..at + width) {
        bytes.copy_from_slice(&value[..width]);
    }
    size
}

/// Where the segments of a JPEG start, as offsets of their marker bytes; the first scan ends it unless
/// another marker is found behind it.
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

/// Whether a JPEG says that it is progressive, by Huffman codes or by arithmetic ones.
#[must_use]
pub fn is_progressive(jpeg: &[u8]) -> bool {
    segments(jpeg).into_iter().any(|at| matches!(jpeg[at + 1], 0xC2 | 0xCA))
}

/// Width and height that a JPEG says it has.
#[must_use]
pub fn jpeg_size(jpeg: &[u8]) -> Option<(u32, u32)> {
    let frame = segments(jpeg).into_iter().find(|at| is_frame(jpeg[at + 1]))?;
    let words = jpeg.get(frame + 5..frame + 9)?;
    let word = |at: usize| u32::from(u16::from_be_bytes([words[at], words[at + 1]]));
    Some((word(2), word(0)))
}

/// Damages a JPEG behind [`FRAME_BYTES`] of choice; returns the input's new size.
pub fn jpeg(data: &mut [u8], size: usize, most: usize, seed: u32) -> usize {
    let mut dice = Dice(seed.into());
    if size < FRAME_BYTES + 4 {
        return fuzzer_mutate(data, size, most);
    }
    match dice.below(8) {
        0 | 1 => fuzzer_mutate(data, size, most),
        2 => {
            // Another part of the same image.
            for byte in &mut data[..FRAME_BYTES] {
                *byte = dice.roll() as u8;
            }
            size
        }
        3 => {
            FRAME_BYTES
                + fuzzer_mutate(&mut data[FRAME_BYTES..], size - FRAME_BYTES, most - FRAME_BYTES)
        }
        _ => {
            let mut size = size;
            for _ in 0..1 + dice.below(3) {
                let jpeg = &mut data[FRAME_BYTES..];
                size = FRAME_BYTES
                    + damage_jpeg(jpeg, size - FRAME_BYTES, most - FRAME_BYTES, &mut dice);
            }
            // Often with another part, too.
            if dice.below(2) == 0 {
                let at = dice.below(FRAME_BYTES);
                data[at] = dice.roll() as u8;
            }
            size
        }
    }
}

fn damage_jpeg(jpeg: &mut [u8], size: usize, most: usize, dice: &mut Dice) -> usize {
    let found = segments(&jpeg[..size]);
    let Some(frame) = found.iter().copied().find(|at| is_frame(jpeg[at + 1])) else {
        let at = dice.below(size);
        jpeg[at] = dice.roll() as u8;
        return size;
    };
    let (at, value) = match dice.below(10) {
        // Kind of the frame: baseline, progressive, lossless, arithmetic.
        0 => (frame + 1, dice.pick(&[0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA, 0xCB])),
        // Precision, height, width, components.
        1 => (frame + 4 + dice.below(6), dice.pick(&[0, 1, 2, 3, 4, 7, 8, 9, 16, 17, 64, 255])),
        // Identifier, sampling factors, table of a component.
        2 => (
            frame + 10 + dice.below(9),
            dice.pick(&[0x11, 0x12, 0x21, 0x22, 0x41, 0x14, 0x31, 0, 1, 2, 3]),
        ),
        3 => {
            // All alike: no reduction, told in an unusual way.
            let factors = dice.pick(&[0x11, 0x12, 0x21, 0x22, 0x13, 0x31]);
            for component in 0..3 {
                if let Some(byte) = jpeg[..size].get_mut(frame + 11 + 3 * component) {
                    *byte = factors;
                }
            }
            return size;
        }
        // Somewhere in a segment's head: scans and tables above all.
        4 | 5 => (dice.pick(&found) + 1 + dice.below(14), dice.roll() as u8),
        // In what is coded.
        6 => (found.last().map_or(0, |last| *last + dice.below(size - last)), dice.roll() as u8),
        7 => return dice.below(size).max(4),
        8 => {
            // A segment (or scan) once more, behind itself.
            let number = dice.below(found.len());
            let start = found[number];
            let end = found.get(number + 1).copied().unwrap_or(size);
            let len = end - start;
            if size + len > most {
                return size;
            }
            jpeg.copy_within(start..size, end);
            return size + len;
        }
        _ => {
            let number = dice.below(found.len());
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
