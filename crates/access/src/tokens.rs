//! The valid tokens of a coordinator, and the token of a client.

use std::{
    fmt, fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use crate::{
    AccessRole, Error,
    bounded::{MAX_TOKENS_BYTES, read_text},
};

/// Minimum length of a token; shorter ones could be guessed.
const MIN_TOKEN_CHARS: usize = 16;

/// A secret token. Its `Debug` output hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Validates a text as a token.
    ///
    /// # Errors
    /// The text is too short, or has characters that are not valid in a header.
    pub fn new(text: &str) -> Result<Self, Error> {
        let text = text.trim();
        if text.len() < MIN_TOKEN_CHARS {
            let problem = format!(
                "a token has at least {MIN_TOKEN_CHARS} characters; create one with `baton cert`"
            );
            return Err(Error(problem));
        }
        match text.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Self(text.to_owned())),
            false => Err(Error("a token has letters, digits and punctuation only".to_owned())),
        }
    }

    /// Reads a token from a file.
    ///
    /// # Errors
    /// The file cannot be read, other users can read it, or it contains no token.
    pub fn read(path: &Path) -> Result<Self, Error> {
        Self::new(&read_private(path)?).map_err(|Error(problem)| Error::of_file(path, problem))
    }

    /// The secret itself, to pass it to a process that needs it.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// The value of the header `authorization`.
    #[must_use]
    pub fn bearer(&self) -> String {
        format!("Bearer {}", self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// The first token of a role in a file of [`Tokens`].
///
/// # Errors
/// The file cannot be read, or has no token of that role.
pub fn of_role(path: &Path, role: AccessRole) -> Result<Token, Error> {
    let text = read_private(path)?;
    let entries = text.lines().filter_map(|line| line.trim().split_once(char::is_whitespace));
    let token = entries.filter(|(name, _)| *name == role.name()).map(|(_, token)| token).next();
    let token =
        token.ok_or_else(|| Error::of_file(path, format!("it has no token of role {role}")))?;
    Token::new(token).map_err(|Error(problem)| Error::of_file(path, problem))
}

/// The valid tokens with their roles, as digests, which are compared in constant time.
#[derive(Clone, Debug, Default)]
pub struct Tokens(Vec<(AccessRole, blake3::Hash)>);

impl Tokens {
    /// Reads a tokens file: one `ROLE TOKEN` per line; lines that begin with `#` are comments. A role may have several
    /// tokens, for example while one replaces another.
    ///
    /// # Errors
    /// The file cannot be read, other users can read it, or a line is invalid.
    pub fn read(path: &Path) -> Result<Self, Error> {
        Self::parse(&read_private(path)?).map_err(|Error(problem)| Error::of_file(path, problem))
    }

    fn parse(text: &str) -> Result<Self, Error> {
        let lines = (1..).zip(text.lines().map(str::trim));
        let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let entries = lines.map(|(number, line)| {
            // The message must not contain the line, which is secret.
            let at_line = |problem: String| Error(format!("line {number}: {problem}"));
            let (role, token) = line
                .split_once(char::is_whitespace)
                .ok_or_else(|| at_line("expected ROLE TOKEN".to_owned()))?;
            let role = AccessRole::ALL.into_iter().find(|known| known.name() == role).ok_or_else(
                || at_line("the first word must be a role: viewer, operator or agent".to_owned()),
            )?;
            let token = Token::new(token).map_err(|Error(problem)| at_line(problem))?;
            Ok((role, digest(&token.0)))
        });
        let entries: Vec<_> = entries.collect::<Result<_, Error>>()?;
        for (index, (role, token)) in entries.iter().enumerate() {
            if let Some((other, _)) = entries[..index].iter().find(|(_, known)| known == token) {
                return Err(Error(format!(
                    "a token of role {role} is also one of role {other}: give each role its own; create them with \
                     `baton cert`"
                )));
            }
        }
        match entries.is_empty() {
            true => Err(Error("it contains no token; a line is ROLE TOKEN".to_owned())),
            false => Ok(Self(entries)),
        }
    }

    /// The roles that this `authorization` header gives. Compares all tokens, so that the time does not depend on
    /// which one matches.
    #[must_use]
    pub fn roles_of(&self, authorization: &str) -> Vec<AccessRole> {
        let Some((scheme, token)) = authorization.split_once(' ') else { return Vec::new() };
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Vec::new();
        }
        let given = digest(token.trim());
        // `blake3::Hash` compares in constant time.
        self.0.iter().filter(|(_, known)| *known == given).map(|(role, _)| *role).collect()
    }
}

fn digest(token: &str) -> blake3::Hash {
    blake3::hash(token.as_bytes())
}

/// Reads a file that no other user may read.
fn read_private(path: &Path) -> Result<String, Error> {
    let metadata = fs::metadata(path).map_err(|error| Error::of_file(path, error))?;
    let mode = metadata.permissions().mode() & 0o777;
    // Other users cannot read a pipe, such as a shell's <(...).
    if metadata.is_file() && !is_private(metadata.uid(), mode) {
        let problem = format!(
            "other users of this machine may read or write it (mode {mode:03o}): chmod 600 {}",
            path.display()
        );
        return Err(Error::of_file(path, problem));
    }
    read_text(path, MAX_TOKENS_BYTES).map_err(|error| Error::of_file(path, error))
}

/// Whether only its owner can access a file, or root owns it and a group may read it: Kubernetes mounts a secret in
/// this way for a user that is not root. PostgreSQL has the same rule for the key of its server.
fn is_private(owner: u32, mode: u32) -> bool {
    const ROOT: u32 = 0;
    let forbidden_bits = if owner == ROOT { 0o037 } else { 0o077 };
    mode & forbidden_bits == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const VIEWER: &str = "viewer-0123456789";
    const OPERATOR: &str = "operator-0123456789";

    fn tokens() -> Tokens {
        let text = format!("# made today\n\nviewer {VIEWER}\n  operator\t{OPERATOR}  \n");
        Tokens::parse(&text).unwrap()
    }

    #[test]
    fn a_token_gives_its_role_and_nothing_else_does() {
        let bearer = |token: &str| tokens().roles_of(&Token::new(token).unwrap().bearer());
        assert_eq!(bearer(VIEWER), [AccessRole::Viewer]);
        assert_eq!(bearer(OPERATOR), [AccessRole::Operator]);
        assert_eq!(bearer("another-0123456789"), []);
        for header in ["", "Bearer", "Bearer ", VIEWER, &format!("Basic {VIEWER}")] {
            assert_eq!(tokens().roles_of(header), [], "{header}");
        }
        assert_eq!(tokens().roles_of(&format!("bearer {VIEWER}")), [AccessRole::Viewer]);
    }

    #[test]
    fn errors_name_the_line_and_contain_no_secret() {
        for (text, problem) in [
            ("", "no token"),
            ("viewer", "line 1: expected ROLE TOKEN"),
            ("\nadmin secret-0123456789", "line 2: the first word must be a role"),
            ("agent secret", "line 1: a token has at least 16"),
            ("agent secret-0123456789ü", "line 1: a token has letters"),
            (
                "viewer secret-0123456789\noperator secret-0123456789",
                "a token of role operator is also one of role viewer",
            ),
        ] {
            let Error(message) = Tokens::parse(text).unwrap_err();
            assert!(message.contains(problem), "{message}");
            assert!(!message.contains("secret"), "{message}");
        }
    }

    #[test]
    fn a_file_that_others_may_read_is_refused_with_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, VIEWER).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let Error(message) = Token::read(&path).unwrap_err();
        assert!(message.contains("mode 644") && message.contains("chmod 600"), "{message}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(Token::read(&path).unwrap(), Token::new(VIEWER).unwrap());
    }

    #[test]
    fn only_root_may_let_a_group_read_a_secret() {
        let (root, user) = (0, 1000);
        for (owner, mode, private) in [
            (user, 0o600, true),
            (user, 0o640, false),
            (root, 0o640, true),
            (root, 0o440, true),
            (root, 0o460, false),
            (root, 0o644, false),
        ] {
            assert_eq!(is_private(owner, mode), private, "{owner} {mode:03o}");
        }
    }

    #[test]
    fn debug_output_contains_no_secret() {
        let shown = format!("{:?} {:?}", Token::new(VIEWER).unwrap(), tokens());
        assert!(!shown.contains(VIEWER) && !shown.contains(OPERATOR), "{shown}");
    }
}
