//! `baton cert`

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    net::IpAddr,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use baton_access::AccessRole;
use baton_job::exit::Failure;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use crate::{
    failure::{bad_input, failed},
    json::{self, MadeCertificates},
};

/// Make a certificate authority, certificates and tokens for a coordinator that other machines call
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton cert --host 10.0.0.5 --host trainer.example
  baton up recipe.toml --listen 10.0.0.5:29600 --tls-ca certs/ca.pem \\
      --tls-cert certs/coordinator.pem --tls-key certs/coordinator-key.pem --tokens certs/tokens
  BATON_TLS_CA=certs/ca.pem BATON_TOKEN_FILE=certs/viewer.token baton status --coordinator https://10.0.0.5:29600

Files in the folder, and where they are needed:
  ca.pem                               every client of the coordinator
  ca-key.pem                           only to make more certificates; keep it away from the machines
  coordinator.pem, coordinator-key.pem the coordinator
  client.pem, client-key.pem           agents and users, if the coordinator has --tls-client-ca certs/ca.pem
  tokens                               the coordinator
  viewer.token, operator.token, agent.token
                                       users who may view the job, users who may control it, and agents")]
pub(crate) struct Args {
    /// Folder to write to
    #[arg(long, value_name = "DIR", default_value = "certs")]
    out: PathBuf,
    /// Host name or address of the coordinator, in addition to localhost; may be repeated
    #[arg(long = "host", value_name = "HOST", value_parser = host)]
    hosts: Vec<String>,
    /// Days for which the certificates are valid
    #[arg(long, value_name = "DAYS", default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..=825))]
    days: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A host name or an address, which a client finds in the certificate.
fn host(text: &str) -> Result<String, String> {
    let is_part = |part: &str| {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        (1..=63).contains(&part.len()) && part.bytes().all(is_valid)
    };
    let name = text.strip_prefix("*.").unwrap_or(text);
    if text.parse::<IpAddr>().is_ok() || (text.len() <= 253 && name.split('.').all(is_part)) {
        return Ok(text.to_owned());
    }
    Err("must be a host name or an address without port, brackets or https://, e.g. trainer.example".to_owned())
}

/// Names of a coordinator on the same machine; every certificate has them.
const LOCAL_HOSTS: [&str; 3] = ["localhost", "127.0.0.1", "::1"];

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let folder = &args.out;
    if folder.join("ca.pem").exists() {
        return Err(bad_input(format!(
            "{} already contains certificates: give another folder with --out, or move them away",
            folder.display()
        )));
    }
    // Of a link to nothing, only the link itself exists.
    if folder.symlink_metadata().is_ok() && !folder.is_dir() {
        return Err(bad_input(format!(
            "{} exists and is not a folder: give another one with --out",
            folder.display()
        )));
    }
    let files = files(args).map_err(|error| {
        bad_input(format!(
            "cannot make a certificate: {error}; check that every --host is a host name or an address"
        ))
    })?;
    write(folder, &files).map_err(|error| failed(format!("{}: {error}", folder.display())))?;
    let made = MadeCertificates {
        folder: folder.display().to_string(),
        files: files.into_iter().map(|file| file.name).collect(),
        days: args.days,
    };
    json::print(args.json, &made, |MadeCertificates { folder, files, days }| {
        let files = files.join(", ");
        format!("{folder}: {files}; valid for {days} days (`baton cert --help` explains the files)")
    });
    Ok(())
}

/// A file to write.
struct CertFile {
    name: String,
    text: String,
    is_secret: bool,
}

fn files(args: &Args) -> Result<Vec<CertFile>, rcgen::Error> {
    let ca_key = KeyPair::generate()?;
    let mut ca = params("Baton development CA", &[], args.days)?;
    ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let mut files = pair("ca", ca.self_signed(&ca_key)?.pem(), &ca_key);
    let issuer = Issuer::new(ca, ca_key);

    let hosts: Vec<String> =
        LOCAL_HOSTS.iter().map(ToString::to_string).chain(args.hosts.iter().cloned()).collect();
    for (name, subject, hosts, purpose) in [
        ("coordinator", "Baton coordinator", &hosts[..], ExtendedKeyUsagePurpose::ServerAuth),
        ("client", "Baton client", &[][..], ExtendedKeyUsagePurpose::ClientAuth),
    ] {
        let key = KeyPair::generate()?;
        let mut params = params(subject, hosts, args.days)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![purpose];
        params.use_authority_key_identifier_extension = true;
        files.extend(pair(name, params.signed_by(&key, &issuer)?.pem(), &key));
    }

    let tokens = AccessRole::ALL.map(|role| (role, token()));
    let lines = tokens.iter().map(|(role, token)| format!("{role} {token}\n"));
    let comment = "# ROLE TOKEN; a role may have several while one is replaced by another\n";
    let all = comment.to_owned() + &lines.collect::<String>();
    files.push(CertFile { name: "tokens".to_owned(), text: all, is_secret: true });
    let single = |(role, token)| CertFile {
        name: format!("{role}.token"),
        text: format!("{token}\n"),
        is_secret: true,
    };
    files.extend(tokens.map(single));
    Ok(files)
}

fn params(subject: &str, hosts: &[String], days: u32) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(hosts)?;
    params.distinguished_name.push(DnType::CommonName, subject);
    let now = SystemTime::now();
    let day = Duration::from_secs(86_400);
    // Valid from yesterday, because clocks differ.
    params.not_before = (now - day).into();
    params.not_after = (now + day * days).into();
    Ok(params)
}

fn pair(name: &str, certificate: String, key: &KeyPair) -> Vec<CertFile> {
    vec![
        CertFile { name: format!("{name}.pem"), text: certificate, is_secret: false },
        CertFile { name: format!("{name}-key.pem"), text: key.serialize_pem(), is_secret: true },
    ]
}

/// A token of 244 random bits: two version 4 UUIDs, each with 122 bits from the system's generator.
fn token() -> String {
    format!("{}{}", uuid::Uuid::new_v4().simple(), uuid::Uuid::new_v4().simple())
}

fn write(folder: &Path, files: &[CertFile]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for CertFile { name, text, is_secret } in files {
        let mode = if *is_secret { 0o600 } else { 0o644 };
        let file =
            OpenOptions::new().write(true).create_new(true).mode(mode).open(folder.join(name));
        file?.write_all(text.as_bytes())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use baton_access::{Token, Tokens, tokens};

    use super::*;

    fn make_certs(folder: &Path) -> Result<(), Failure> {
        let (out, hosts) = (folder.to_owned(), vec!["10.0.0.5".to_owned()]);
        run(&Args { out, hosts, days: 3, json: false })
    }

    #[test]
    fn secrets_are_readable_only_by_the_owner_and_tokens_match() {
        let folder = tempfile::tempdir().unwrap();
        let certs = folder.path().join("certs");
        make_certs(&certs).unwrap();
        for entry in fs::read_dir(&certs).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            let mode = entry.metadata().unwrap().permissions().mode() & 0o777;
            let is_public = ["ca.pem", "coordinator.pem", "client.pem"].contains(&name.as_str());
            assert_eq!(mode, if is_public { 0o644 } else { 0o600 }, "{name}");
        }
        let known = Tokens::read(&certs.join("tokens")).unwrap();
        for role in AccessRole::ALL {
            let token = Token::read(&certs.join(format!("{role}.token"))).unwrap();
            assert_eq!(known.roles_of(&token.bearer()), [role]);
            assert_eq!(tokens::of_role(&certs.join("tokens"), role).unwrap(), token);
        }
    }

    #[test]
    fn a_file_or_a_link_to_nothing_is_no_folder_for_certificates() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink("nothing", &link).unwrap();
        for out in [file, link] {
            let error = make_certs(&out).unwrap_err();
            assert_eq!(error.class, baton_job::exit::Class::BadInput);
            assert!(error.message.contains("exists and is not a folder"), "{error}");
        }
    }

    #[test]
    fn certificates_are_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        make_certs(folder.path()).unwrap();
        let before = fs::read(folder.path().join("ca-key.pem")).unwrap();
        let error = make_certs(folder.path()).unwrap_err();
        assert!(error.message.contains("--out"), "{error}");
        assert_eq!(fs::read(folder.path().join("ca-key.pem")).unwrap(), before);
    }
}
