//! Certificates, keys and tokens from files given by flags.

use std::path::{Path, PathBuf};

use tonic::transport::{Certificate, ClientTlsConfig, Identity, ServerTlsConfig};

use crate::{
    Error, Token, Tokens,
    bounded::{MAX_PEM_BYTES, read_text},
    client::{Bearer, ClientCredentials, check_identity},
};

/// Flags of a server.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ServerFiles {
    /// Serve over TLS with this certificate, followed by its intermediate certificates (PEM)
    #[arg(long, help_heading = "Access", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert (PEM)
    #[arg(long, help_heading = "Access", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Serve only clients with a certificate of this authority (PEM)
    #[arg(long, help_heading = "Access", value_name = "FILE", requires = "tls_cert")]
    pub tls_client_ca: Option<PathBuf>,
    /// Serve only clients with one of the tokens in this file: one per line, ROLE TOKEN, where ROLE is viewer, operator
    /// or agent
    #[arg(long, help_heading = "Access", value_name = "FILE")]
    pub tokens: Option<PathBuf>,
}

impl ServerFiles {
    /// Whether connections are encrypted and calls need a token.
    #[must_use]
    pub fn are_secure(&self) -> bool {
        self.tls_cert.is_some() && self.tokens.is_some()
    }

    /// The TLS settings, if there are any.
    ///
    /// # Errors
    /// A file cannot be read; the certificate or its key is invalid, or they do not belong together.
    pub fn tls(&self) -> Result<Option<ServerTlsConfig>, Error> {
        let (Some(cert), Some(key)) = (&self.tls_cert, &self.tls_key) else { return Ok(None) };
        let identity = Identity::from_pem(read(cert)?, read(key)?);
        check_identity(&identity).map_err(|problem| {
            let (cert, key) = (cert.display(), key.display());
            Error(format!("--tls-cert {cert} and --tls-key {key} cannot be used: {problem}; give a certificate and its own key"))
        })?;
        let tls = ServerTlsConfig::new().identity(identity);
        match &self.tls_client_ca {
            Some(ca) => Ok(Some(tls.client_ca_root(Certificate::from_pem(read(ca)?)))),
            None => Ok(Some(tls)),
        }
    }

    /// The tokens, if there are any.
    ///
    /// # Errors
    /// The file cannot be read or is invalid.
    pub fn tokens(&self) -> Result<Option<Tokens>, Error> {
        self.tokens.as_deref().map(Tokens::read).transpose()
    }

    /// The flags as arguments for a child process.
    #[must_use]
    pub fn to_arguments(&self) -> Vec<(&'static str, &Path)> {
        let flags = [
            ("--tls-cert", &self.tls_cert),
            ("--tls-key", &self.tls_key),
            ("--tls-client-ca", &self.tls_client_ca),
            ("--tokens", &self.tokens),
        ];
        flags.into_iter().filter_map(|(flag, file)| Some((flag, file.as_deref()?))).collect()
    }
}

/// TLS flags of a client of a coordinator with an `https://` address.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TlsFiles {
    /// Authority of the coordinator's certificate (PEM) [default: the authorities that this system trusts]
    #[arg(
        long,
        help_heading = "Access",
        value_name = "FILE",
        env = "BATON_TLS_CA",
        hide_env_values = true
    )]
    pub tls_ca: Option<PathBuf>,
    /// Client certificate, if the coordinator requires one (PEM)
    #[arg(
        long,
        help_heading = "Access",
        value_name = "FILE",
        env = "BATON_TLS_CERT",
        hide_env_values = true,
        requires = "client_key"
    )]
    pub client_cert: Option<PathBuf>,
    /// Private key of --client-cert (PEM)
    #[arg(
        long,
        help_heading = "Access",
        value_name = "FILE",
        env = "BATON_TLS_KEY",
        hide_env_values = true,
        requires = "client_cert"
    )]
    pub client_key: Option<PathBuf>,
}

impl TlsFiles {
    /// The credentials of a client with this token.
    ///
    /// # Errors
    /// A file cannot be read or is invalid.
    pub fn credentials(&self, token: Option<&Token>) -> Result<ClientCredentials, Error> {
        let read = |file: &Path, source: &str| {
            read(file).map_err(|Error(problem)| Error(format!("{source}: {problem}")))
        };
        let tls = match &self.tls_ca {
            Some(ca) => {
                let ca = read(ca, "--tls-ca or BATON_TLS_CA")?;
                ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca))
            }
            None => ClientTlsConfig::new().with_native_roots(),
        };
        let tls = match (&self.client_cert, &self.client_key) {
            (Some(cert), Some(key)) => {
                let identity = Identity::from_pem(
                    read(cert, "--client-cert or BATON_TLS_CERT")?,
                    read(key, "--client-key or BATON_TLS_KEY")?,
                );
                check_identity(&identity).map_err(|problem| {
                    let (cert, key) = (cert.display(), key.display());
                    Error(format!(
                        "{cert} and {key} cannot be used as client certificate and its private key: {problem}"
                    ))
                })?;
                tls.identity(identity)
            }
            _ => tls,
        };
        Ok(ClientCredentials { tls, bearer: Bearer::new(token)? })
    }

    /// The flags as environment variables for a child process.
    #[must_use]
    pub fn to_variables(&self) -> Vec<(&'static str, &Path)> {
        let variables = [
            ("BATON_TLS_CA", &self.tls_ca),
            ("BATON_TLS_CERT", &self.client_cert),
            ("BATON_TLS_KEY", &self.client_key),
        ];
        variables.into_iter().filter_map(|(name, file)| Some((name, file.as_deref()?))).collect()
    }
}

/// Flags of a client of a coordinator.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ClientFiles {
    /// Flags for TLS.
    #[command(flatten)]
    pub tls: TlsFiles,
    /// File with a token; the environment variable BATON_TOKEN can contain the token itself
    #[arg(
        long,
        help_heading = "Access",
        value_name = "FILE",
        env = "BATON_TOKEN_FILE",
        hide_env_values = true
    )]
    pub token_file: Option<PathBuf>,
}

impl ClientFiles {
    /// The credentials of a client; `variable` reads an environment variable.
    ///
    /// # Errors
    /// A file cannot be read or is invalid.
    pub fn credentials(
        &self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<ClientCredentials, Error> {
        let text = variable(TOKEN_VARIABLE).filter(|text| !text.is_empty());
        let with_name = |Error(problem)| Error(format!("{TOKEN_VARIABLE}: {problem}"));
        let token = match (&self.token_file, text) {
            (Some(file), _) => Some(Token::read(file).map_err(|Error(problem)| {
                Error(format!("--token-file or BATON_TOKEN_FILE: {problem}"))
            })?),
            (None, Some(text)) => Some(Token::new(&text).map_err(with_name)?),
            (None, None) => None,
        };
        self.tls.credentials(token.as_ref())
    }
}

/// Environment variable that contains a token; a token file takes precedence.
pub const TOKEN_VARIABLE: &str = "BATON_TOKEN";

fn read(path: &Path) -> Result<String, Error> {
    let text = read_text(path, MAX_PEM_BYTES).map_err(|error| Error::of_file(path, error))?;
    match text.contains("-----BEGIN ") {
        true => Ok(text),
        false => Err(Error::of_file(path, "is not a PEM file: it has no -----BEGIN line")),
    }
}
