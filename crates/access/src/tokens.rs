//! The tokens that a coordinator knows, and the one that a client has.

use std::{
    fmt, fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use crate::{Error, Role};

/// Shorter ones can be guessed.
const LEAST_CHARS: usize = 16;

/// A secret. It does not show itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Takes a text for a token.
    ///
    /// # Errors
    /// It is too short, or has characters that a header cannot carry.
    pub fn new(text: &str) -> Result<Self, Error> {
        let text = text.trim();
        if text.len() < LEAST_CHARS {
            let problem = format!(
                "a token has at least {LEAST_CHARS} characters; `baton cert` makes good ones"
            );
            return Err(Error(problem));
        }
        match text.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Self(text.to_owned())),
            false => Err(Error("a token has letters, digits and punctuation only".to_owned())),
        }
    }

    /// The one in a file.
    ///
    /// # Errors
    /// The file cannot be read, others can read it, or it holds no token.
    pub fn read(path: &Path) -> Result<Self, Error> {
        Self::new(&read_private(path)?).map_err(|Error(problem)| Error::of_file(path, problem))
    }

    /// The secret itself, to be handed to a process that needs it.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// What goes into the header `authorization`.
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
/// The file cannot be read, or has none of that role.
pub fn of_role(path: &Path, role: Role) -> Result<Token, Error> {
    let text = read_private(path)?;
    let named = text.lines().filter_map(|line| line.trim().split_once(char::is_whitespace));
    let token = named.filter(|(name, _)| *name == role.name()).map(|(_, token)| token).next();
    let token =
        token.ok_or_else(|| Error::of_file(path, format!("it has no token of role {role}")))?;
    Token::new(token).map_err(|Error(problem)| Error::of_file(path, problem))
}

/// The tokens that are known, each with its role: as digests, which are compared in constant time.
#[derive(Clone, Debug, Default)]
pub struct Tokens(Vec<(Role, blake3::Hash)>);

impl Tokens {
    /// Those in a file: a line each, `ROLE TOKEN`; lines that begin with `#` are comments. A role may have several,
    /// as when one is being replaced by another.
    ///
    /// # Errors
    /// The file cannot be read, others can read it, or a line is no role and token.
    pub fn read(path: &Path) -> Result<Self, Error> {
        Self::parse(&read_private(path)?).map_err(|Error(problem)| Error::of_file(path, problem))
    }

    fn parse(text: &str) -> Result<Self, Error> {
        let lines = (1..).zip(text.lines().map(str::trim));
        let told = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let entries = told.map(|(number, line)| {
            // The line itself is secret.
            let named = |problem: String| Error(format!("line {number}: {problem}"));
            let (role, token) = line
                .split_once(char::is_whitespace)
                .ok_or_else(|| named("expected ROLE TOKEN".to_owned()))?;
            let role =
                Role::ALL.into_iter().find(|known| known.name() == role).ok_or_else(|| {
                    named("the first word is no role: viewer, operator or agent".to_owned())
                })?;
            let token = Token::new(token).map_err(|Error(problem)| named(problem))?;
            Ok((role, digest(&token.0)))
        });
        let entries: Vec<_> = entries.collect::<Result<_, Error>>()?;
        match entries.is_empty() {
            true => Err(Error("it holds no token; a line is ROLE TOKEN".to_owned())),
            false => Ok(Self(entries)),
        }
    }

    /// The roles of whoever sends this `authorization` header. All tokens are looked at, whichever is right.
    #[must_use]
    pub fn roles_of(&self, authorization: &str) -> Vec<Role> {
        let Some((scheme, token)) = authorization.split_once(' ') else { return Vec::new() };
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Vec::new();
        }
        let theirs = digest(token.trim());
        // `blake3::Hash` compares in constant time.
        self.0.iter().filter(|(_, known)| *known == theirs).map(|(role, _)| *role).collect()
    }
}

fn digest(token: &str) -> blake3::Hash {
    blake3::hash(token.as_bytes())
}

/// A file that nobody else may read.
fn read_private(path: &Path) -> Result<String, Error> {
    let metadata = fs::metadata(path).map_err(|error| Error::of_file(path, error))?;
    let mode = metadata.permissions().mode() & 0o777;
    // Pipes, as a shell's <(...) makes them, have no other readers.
    if metadata.is_file() && !is_private(metadata.uid(), mode) {
        let problem = format!(
            "others on this machine may read or write it (mode {mode:03o}): chmod 600 {}",
            path.display()
        );
        return Err(Error::of_file(path, problem));
    }
    fs::read_to_string(path).map_err(|error| Error::of_file(path, error))
}

/// Whether a file is its owner's alone, or root's who lets a group read it: so Kubernetes mounts a secret for
/// a user that is not root. PostgreSQL has this rule for its server's key.
fn is_private(owner: u32, mode: u32) -> bool {
    const ROOT: u32 = 0;
    let of_others = if owner == ROOT { 0o037 } else { 0o077 };
    mode & of_others == 0
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
        assert_eq!(bearer(VIEWER), [Role::Viewer]);
        assert_eq!(bearer(OPERATOR), [Role::Operator]);
        assert_eq!(bearer("another-0123456789"), []);
        for header in ["", "Bearer", "Bearer ", VIEWER, &format!("Basic {VIEWER}")] {
            assert_eq!(tokens().roles_of(header), [], "{header}");
        }
        assert_eq!(tokens().roles_of(&format!("bearer {VIEWER}")), [Role::Viewer]);
    }

    #[test]
    fn bad_files_are_named_by_line_and_tell_no_secret() {
        for (text, problem) in [
            ("", "no token"),
            ("viewer", "line 1: expected ROLE TOKEN"),
            ("\nadmin secret-0123456789", "line 2: the first word is no role"),
            ("agent secret", "line 1: a token has at least 16"),
            ("agent secret-0123456789ü", "line 1: a token has letters"),
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
    fn secrets_do_not_show_themselves() {
        let shown = format!("{:?} {:?}", Token::new(VIEWER).unwrap(), tokens());
        assert!(!shown.contains(VIEWER) && !shown.contains(OPERATOR), "{shown}");
    }
}
