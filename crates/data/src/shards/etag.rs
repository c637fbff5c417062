//! Whether downloaded bytes are those that the store has, as far as an `ETag` can tell.
//!
//! S3 makes no promise, but the tag of an object stored in one request is the MD5 of its bytes, and
//! that of one stored in `n` parts is the MD5 of the parts' MD5s, then `-n`. The parts' length is
//! not recorded; 8 MiB is what the AWS command line and boto3 take, so only that is tried. With
//! KMS encryption the tag is no digest at all: a mismatch is a suspicion, which another download
//! settles (see `fetch`).

use md5::{Digest, Md5, digest::Output};

/// The usual length of a part in bytes.
const PART: u64 = 8 << 20;

/// What an `ETag` says about the bytes it came with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// They have its digest.
    Same,
    /// They have not; or the tag is no digest of them.
    Suspect,
    /// The tag cannot be a digest that is known here.
    Unknown,
}

/// Digests bytes in the order of the object, and compares.
pub(super) struct Check {
    tag: String,
    kind: Kind,
}

enum Kind {
    Whole(Md5),
    Parts { part: Md5, part_bytes: u64, digests: Md5, count: u64 },
    Unknown,
}

/// A tag without the quotes and the mark of weakness that servers write differently.
pub(super) fn bare(tag: &str) -> &str {
    tag.trim_start_matches("W/").trim_matches('"')
}

impl Check {
    pub(super) fn new(tag: Option<&str>, object_bytes: u64) -> Self {
        let tag = bare(tag.unwrap_or_default()).to_ascii_lowercase();
        let (digest, count) = match tag.split_once('-') {
            Some((digest, count)) => (digest, count.parse().ok()),
            None => (tag.as_str(), None),
        };
        let is_digest = digest.len() == 32 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
        let kind = match count {
            _ if !is_digest => Kind::Unknown,
            None if tag.contains('-') => Kind::Unknown,
            None => Kind::Whole(Md5::new()),
            Some(count) if count == object_bytes.div_ceil(PART) => {
                Kind::Parts { part: Md5::new(), part_bytes: 0, digests: Md5::new(), count }
            }
            Some(_) => Kind::Unknown,
        };
        Self { tag, kind }
    }

    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        match &mut self.kind {
            Kind::Unknown => {}
            Kind::Whole(md5) => md5.update(bytes),
            Kind::Parts { part, part_bytes, digests, .. } => {
                while !bytes.is_empty() {
                    let left = usize::try_from(PART - *part_bytes).unwrap_or(usize::MAX);
                    let (now, later) = bytes.split_at(left.min(bytes.len()));
                    part.update(now);
                    *part_bytes += now.len() as u64;
                    if *part_bytes == PART {
                        digests.update(part.finalize_reset());
                        *part_bytes = 0;
                    }
                    bytes = later;
                }
            }
        }
    }

    pub(super) fn verdict(self) -> Verdict {
        let found = match self.kind {
            Kind::Unknown => return Verdict::Unknown,
            Kind::Whole(md5) => hex(md5.finalize()),
            Kind::Parts { part, part_bytes, mut digests, count } => {
                if part_bytes > 0 {
                    digests.update(part.finalize());
                }
                format!("{}-{count}", hex(digests.finalize()))
            }
        };
        if found == self.tag { Verdict::Same } else { Verdict::Suspect }
    }
}

fn hex(digest: Output<Md5>) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Digest of `bytes` fed in `pieces` bytes at a time.
    fn verdict(tag: &str, bytes: &[u8], pieces: usize) -> Verdict {
        let mut check = Check::new(Some(tag), bytes.len() as u64);
        bytes.chunks(pieces).for_each(|piece| check.update(piece));
        check.verdict()
    }

    #[test]
    fn the_digest_of_the_whole_is_known() {
        // RFC 1321, A.5.
        let tag = "\"900150983cd24fb0d6963f7d28e17f72\"";
        assert_eq!(verdict(tag, b"abc", 2), Verdict::Same);
        assert_eq!(verdict(tag, b"abd", 2), Verdict::Suspect);
    }

    #[test]
    fn the_digest_of_usual_parts_is_known() {
        let bytes = vec![7; (PART + 5) as usize];
        let (first, last) = bytes.split_at(PART as usize);
        let parts = [Md5::digest(first), Md5::digest(last)].concat();
        let tag = format!("\"{}-2\"", hex(Md5::digest(parts)));

        assert_eq!(verdict(&tag, &bytes, 3 << 20), Verdict::Same);
        assert_eq!(verdict(&tag, &bytes[1..], 3 << 20), Verdict::Suspect);
    }

    #[test]
    fn other_tags_say_nothing() {
        for tag in ["", "\"v1\"", "\"900150983cd24fb0d6963f7d28e17f72-9\"", "W/\"12-ab\""] {
            assert_eq!(verdict(tag, b"abc", 3), Verdict::Unknown, "{tag}");
        }
    }
}
