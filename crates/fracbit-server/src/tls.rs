//! Encryption: who serves without a proxy before it brings a certificate.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};
use tokio_rustls::rustls::{ServerConfig, crypto::ring};

/// A certificate and its key, which connections are encrypted with (TLS 1.2 and 1.3).
#[derive(Clone)]
pub struct Tls(pub(crate) TlsAcceptor);

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

/// A certificate or key that is none.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file that cannot be read as what it should be.
    #[error("`{}` should hold {what} in PEM form: {why}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
        /// What it has instead.
        why: String,
    },
    /// The two do not belong together, or the key is of a kind that is not served.
    #[error("`{}` should be the key of the certificate in `{}`: {why}", key.display(), certificate.display())]
    Pair {
        /// File of the key.
        key: PathBuf,
        /// File of the certificate.
        certificate: PathBuf,
        /// What is wrong.
        why: String,
    },
}

impl Tls {
    /// Reads a certificate, with those that vouch for it behind it, and its key.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let bad = |path: &Path, what: &'static str, error: pem::Error| TlsError::File {
            path: path.to_owned(),
            what,
            why: match error {
                pem::Error::NoItemsFound => "there is none".to_owned(),
                other => other.to_string(),
            },
        };
        let no_chain = |error| bad(certificate, "a certificate", error);
        let chain: Vec<_> = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect::<Result<_, _>>)
            .map_err(no_chain)?;
        if chain.is_empty() {
            return Err(no_chain(pem::Error::NoItemsFound));
        }
        let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| bad(key, "a private key", error))?;
        let made = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret));
        let mut config = made.map_err(|error| TlsError::Pair {
            key: key.to_owned(),
            certificate: certificate.to_owned(),
            why: error.to_string(),
        })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(Arc::new(config).into()))
    }
}
