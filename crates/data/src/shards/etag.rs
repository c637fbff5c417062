//! Whether downloaded bytes are those that the store has, as far as an `ETag` can tell.
//!
//! S3 makes no promise, but the tag of an object stored in one request is the MD5 of its bytes, and
//! that of one stored in `n` parts is the MD5 of the parts' MD5s, then `-n`. The parts' length is
//! not recorded: if there are as many as ours they are taken to be ours, whose 8 MiB are what the
//! AWS command line and boto3 take. With KMS encryption the tag is no digest at all: a mismatch is a
//! suspicion, which another download settles (see `fetch`).

use md5::{Digest, Md5, digest::Output};

/// The MD5 of one part.
pub(super) type PartDigest = Output<Md5>;

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

/// Takes the parts of an object in their order, and compares.
pub(super) struct Check {
    tag: String,
    kind: Kind,
}

enum Kind {
    Whole(Md5),
    Parts { digests: Md5, count: u64 },
    Unknown,
}

/// A tag without the quotes and the mark of weakness that servers write differently.
pub(super) fn bare(tag: &str) -> &str {
    tag.trim_start_matches("W/").trim_matches('"')
}

pub(super) fn part_digest(part: &[u8]) -> PartDigest {
    Md5::digest(part)
}

impl Check {
    /// For an object that comes in so many parts.
    pub(super) fn new(tag: Option<&str>, parts: u64) -> Self {
        let tag = bare(tag.unwrap_or_default()).to_ascii_lowercase();
        let (digest, count) = match tag.split_once('-') {
            Some((digest, count)) => (digest, Some(count.parse().unwrap_or(0))),
            None => (tag.as_str(), None),
        };
        let is_digest = digest.len() == 32 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
        let kind = match count {
            None if is_digest => Kind::Whole(Md5::new()),
            Some(count) if is_digest && count == parts => {
                Kind::Parts { digests: Md5::new(), count }
            }
            _ => Kind::Unknown,
        };
        Self { tag, kind }
    }

    /// Whether [`update`](Self::update) is to be given the digest of each part, which may be
    /// computed anywhere and in any order.
    pub(super) fn is_by_part(&self) -> bool {
        matches!(self.kind, Kind::Parts { .. })
    }

    pub(super) fn update(&mut self, part: &[u8], digest: Option<PartDigest>) {
        match &mut self.kind {
            Kind::Unknown => {}
            Kind::Whole(md5) => md5.update(part),
            Kind::Parts { digests, .. } => {
                digests.update(digest.unwrap_or_else(|| part_digest(part)));
            }
        }
    }

    pub(super) fn verdict(self) -> Verdict {
        let found = match self.kind {
            Kind::Unknown => return Verdict::Unknown,
            Kind::Whole(md5) => hex(md5.finalize()),
            Kind::Parts { digests, count } => format!("{}-{count}", hex(digests.finalize())),
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

    fn verdict(tag: &str, parts: &[&[u8]]) -> Verdict {
        let mut check = Check::new(Some(tag), parts.len() as u64);
        parts.iter().for_each(|part| check.update(part, None));
        check.verdict()
    }

    #[test]
    fn the_digest_of_the_whole_is_known() {
        // RFC 1321, A.5.
        let tag = "\"900150983cd24fb0d6963f7d28e17f72\"";
        assert_eq!(verdict(tag, &[b"ab", b"c"]), Verdict::Same);
        assert_eq!(verdict(tag, &[b"ab", b"d"]), Verdict::Suspect);
    }

    #[test]
    fn the_digest_of_as_many_parts_is_known() {
        let parts = [part_digest(b"ab"), part_digest(b"c")].concat();
        let tag = format!("W/\"{}-2\"", hex(Md5::digest(parts)));

        assert_eq!(verdict(&tag, &[b"ab", b"c"]), Verdict::Same);
        assert_eq!(verdict(&tag, &[b"a", b"bc"]), Verdict::Suspect);
        assert_eq!(verdict(&tag, &[b"abc"]), Verdict::Unknown);
    }

    #[test]
    fn other_tags_say_nothing() {
        for tag in ["", "\"v1\"", "\"900150983cd24fb0d6963f7d28e17f72-x\"", "W/\"12-1\""] {
            assert_eq!(verdict(tag, &[b"abc"]), Verdict::Unknown, "{tag}");
        }
    }
}
