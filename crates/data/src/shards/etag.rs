//! Compares downloaded bytes with the object's `ETag`.
//!
//! S3 does not guarantee it, but the tag of an object stored in one request is the MD5 of its bytes, and the tag of
//! an object stored in `n` parts is the MD5 of the parts' MD5s, then `-n`. The size of the parts is not recorded: if
//! their number is the same as here, they are assumed to have the same size, 8 MiB, the default of the AWS command
//! line and boto3. With KMS encryption the tag is not a digest. So after a mismatch a second download decides (see
//! `fetch`).

use md5::{Digest, Md5, digest::Output};

/// The MD5 of one part.
pub(super) type PartDigest = Output<Md5>;

/// Result of comparing bytes with an `ETag`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TagMatch {
    /// The bytes match the tag.
    Match,
    /// The bytes do not match, or the tag is not a digest of them.
    Mismatch,
    /// The tag has a format that cannot be compared.
    Unknown,
}

/// Compares the parts of an object, given in order, with its tag.
pub(super) struct Check {
    tag: String,
    kind: TagKind,
}

enum TagKind {
    Whole(Md5),
    Parts { digests: Md5, count: u64 },
    Unknown,
}

/// A tag without quotes and weakness mark, which differ between servers.
pub(super) fn bare(tag: &str) -> &str {
    tag.trim_start_matches("W/").trim_matches('"')
}

pub(super) fn part_digest(part: &[u8]) -> PartDigest {
    Md5::digest(part)
}

impl Check {
    /// For an object that is downloaded in `parts` parts.
    pub(super) fn new(tag: Option<&str>, parts: u64) -> Self {
        let tag = bare(tag.unwrap_or_default()).to_ascii_lowercase();
        let (digest, count) = match tag.split_once('-') {
            Some((digest, count)) => (digest, Some(count.parse().unwrap_or(0))),
            None => (tag.as_str(), None),
        };
        let is_digest = digest.len() == 32 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
        let kind = match count {
            None if is_digest => TagKind::Whole(Md5::new()),
            Some(count) if is_digest && count == parts => {
                TagKind::Parts { digests: Md5::new(), count }
            }
            _ => TagKind::Unknown,
        };
        Self { tag, kind }
    }

    /// Whether [`update`](Self::update) needs the digest of each part. The digests can be computed on any thread and
    /// in any order.
    pub(super) fn is_by_part(&self) -> bool {
        matches!(self.kind, TagKind::Parts { .. })
    }

    pub(super) fn update(&mut self, part: &[u8], digest: Option<PartDigest>) {
        match &mut self.kind {
            TagKind::Unknown => {}
            TagKind::Whole(md5) => md5.update(part),
            TagKind::Parts { digests, .. } => {
                digests.update(digest.unwrap_or_else(|| part_digest(part)));
            }
        }
    }

    pub(super) fn tag_match(self) -> TagMatch {
        let found = match self.kind {
            TagKind::Unknown => return TagMatch::Unknown,
            TagKind::Whole(md5) => hex(md5.finalize()),
            TagKind::Parts { digests, count } => format!("{}-{count}", hex(digests.finalize())),
        };
        if found == self.tag { TagMatch::Match } else { TagMatch::Mismatch }
    }
}

fn hex(digest: Output<Md5>) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag_match(tag: &str, parts: &[&[u8]]) -> TagMatch {
        let mut check = Check::new(Some(tag), parts.len() as u64);
        parts.iter().for_each(|part| check.update(part, None));
        check.tag_match()
    }

    #[test]
    fn the_digest_of_a_whole_object_is_compared() {
        // RFC 1321, A.5.
        let tag = "\"900150983cd24fb0d6963f7d28e17f72\"";
        assert_eq!(tag_match(tag, &[b"ab", b"c"]), TagMatch::Match);
        assert_eq!(tag_match(tag, &[b"ab", b"d"]), TagMatch::Mismatch);
    }

    #[test]
    fn the_digest_of_the_same_number_of_parts_is_compared() {
        let parts = [part_digest(b"ab"), part_digest(b"c")].concat();
        let tag = format!("W/\"{}-2\"", hex(Md5::digest(parts)));

        assert_eq!(tag_match(&tag, &[b"ab", b"c"]), TagMatch::Match);
        assert_eq!(tag_match(&tag, &[b"a", b"bc"]), TagMatch::Mismatch);
        assert_eq!(tag_match(&tag, &[b"abc"]), TagMatch::Unknown);
    }

    #[test]
    fn other_tags_are_unknown() {
        for tag in ["", "\"v1\"", "\"900150983cd24fb0d6963f7d28e17f72-x\"", "W/\"12-1\""] {
            assert_eq!(tag_match(tag, &[b"abc"]), TagMatch::Unknown, "{tag}");
        }
    }
}
