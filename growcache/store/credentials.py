"""Storage options for the clients: obstore for S3, asyncssh for SSH servers, and web sessions.

For S3 the precedence is that of boto3: ``storage_options``, the environment, the profile in
``~/.aws``, the machine's own role.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote, urlsplit

from growcache.errors import ConfigError, CredentialsError
from growcache.store.response_check import is_requested_range
from growcache.store.urls import WEB_SCHEMES, Location
from growcache.usercode import short_key

if TYPE_CHECKING:
    from aiohttp import ClientRequest, ClientResponse, ClientSession

    Handler = Callable[[ClientRequest], Awaitable[ClientResponse]]

# botocore renews temporary credentials at least ten minutes before they expire. This ttl is
# shorter, so expired credentials are never used. With obstore's default of 30 minutes they
# could be.
_CREDENTIALS_TTL = timedelta(minutes=5)

_S3_NAMES = {  # name in fsspec (s3fs) -> name in obstore
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "anon": "skip_signature",
    "endpoint_url": "endpoint",
    "requester_pays": "request_payer",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region_name": "region",
}
_S3_OBSTORE_NAMES = frozenset(
    {
        "access_key_id", "secret_access_key", "session_token", "skip_signature", "endpoint",
        "region", "request_payer", "virtual_hosted_style_request", "sse_customer_key_base64",
        "server_side_encryption", "s3_express",
    }
)  # fmt: skip


CredentialProvider: TypeAlias = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class S3Settings:
    config: dict[str, Any]
    verify: bool | str = True
    provider: CredentialProvider | None = field(default=None, repr=False)


def s3_settings(bucket: str, options: Mapping[str, Any]) -> S3Settings | None:
    """Return obstore's settings for a bucket, or None if obstore lacks an option."""
    values = _flatten_options(options)
    if values is None:
        return None
    verify = values.pop("verify", True)
    aws = _AwsFiles(values.pop("profile", None))
    config = {"bucket": bucket, **values}
    static = _static_credentials(config, aws.profile)
    provider: CredentialProvider | None = None
    if not config.setdefault("skip_signature", False):
        provider = static or aws.credentials(bucket)
    if region := config.get("region") or aws.region():
        config["region"] = region
    if endpoint := config.pop("endpoint", None) or aws.endpoint():
        if config.get("virtual_hosted_style_request"):
            found = _virtual_hosted_endpoint(bucket, str(endpoint))
            config["virtual_hosted_style_request"] = found is not None
            endpoint = found or endpoint
        # Both names are read, because obstore prefers AWS_ENDPOINT_URL_S3 to the plain one.
        config["endpoint"] = config["aws_endpoint_url_s3"] = str(endpoint).rstrip("/")
    return S3Settings(config, verify, provider)


def _virtual_hosted_endpoint(bucket: str, endpoint: str) -> str | None:
    """Return the endpoint with the bucket in its host, as obstore needs it.

    None means an IP address, for which boto3 does not do this either.

    >>> _virtual_hosted_endpoint("b", "https://s3.lab:9000/"), _virtual_hosted_endpoint("b", "https://b.s3.lab")
    ('https://b.s3.lab:9000/', 'https://b.s3.lab')
    >>> _virtual_hosted_endpoint("b", "http://127.0.0.1:9000")
    """
    scheme, separator, rest = endpoint.partition("://")
    with suppress(ValueError):  # a name
        ip_address(urlsplit(endpoint).hostname or "")
        return None
    if not separator:
        return None
    return endpoint if rest.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{rest}"


def _flatten_options(options: Mapping[str, Any]) -> dict[str, Any] | None:
    values: dict[str, Any] = {}
    for name, value in options.items():
        if value is None or name == "use_ssl":  # the endpoint's scheme implies it
            continue
        if name == "client_kwargs" and isinstance(value, Mapping):
            nested = _flatten_options(value)
            if nested is None:
                return None
            values = nested | values
        elif name == "config_kwargs" and isinstance(value, Mapping):
            style = value.get("s3")
            if set(value) != {"s3"} or not isinstance(style, Mapping):
                return None
            if set(style) != {"addressing_style"}:
                return None
            values["virtual_hosted_style_request"] = style["addressing_style"] == "virtual"
        elif name in ("profile", "verify"):
            values[name] = value
        elif name in _S3_NAMES or name in _S3_OBSTORE_NAMES:
            values[_S3_NAMES.get(name, name)] = value
        else:
            return None
    return values


def _static_credentials(
    config: dict[str, Any], profile: str | None
) -> CredentialProvider | None:
    """Return a provider of the configured keys, or else of those in the environment.

    As plain configuration, obstore would add a session token of the environment to the keys.
    """
    key, secret = config.pop("access_key_id", None), config.pop("secret_access_key", None)
    token = config.pop("session_token", None)
    if (key is None) != (secret is None):
        raise ConfigError(
            "source.storage_options: expected both key and secret, found only "
            + ("secret" if key is None else "key"),
            code="GC215",
        )
    if key is None and profile is None:  # a named profile takes precedence over the environment
        key = os.environ.get("AWS_ACCESS_KEY_ID")
        secret = os.environ.get("AWS_SECRET_ACCESS_KEY")
        token = os.environ.get("AWS_SESSION_TOKEN") or os.environ.get("AWS_SECURITY_TOKEN")
    if not key or not secret:
        return None
    found = {
        "access_key_id": str(key),
        "secret_access_key": str(secret),
        "token": token,
        "expires_at": None,
    }
    return lambda: found


def server_option(
    scheme: str, options: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> str:
    """Return the name of the setting with the server's address, or an empty text.

    >>> server_option("s3", {"endpoint_url": "http://minio:9000"})
    'endpoint_url in source.storage_options'
    >>> server_option("s3", {}, {"AWS_ENDPOINT_URL": "http://minio:9000"})
    'AWS_ENDPOINT_URL'
    """
    if scheme in ("http", "https", "sftp", "ssh"):
        return "source.url"
    given = [options, options.get("client_kwargs")]
    for values in given:
        for name in ("endpoint_url", "endpoint", "base_url", "connection_string"):
            if isinstance(values, Mapping) and values.get(name):
                return f"{name} in source.storage_options"
    if scheme not in ("s3", "s3a"):
        return ""
    environment = os.environ if environment is None else environment
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if environment.get(name):
            return name
    return ""


class _AwsFiles:
    """The environment and ``~/.aws``. botocore is loaded only if there is something to read."""

    def __init__(self, profile: str | None) -> None:
        self.profile = profile

    def credentials(self, bucket: str) -> CredentialProvider | None:
        """Return boto3's credentials, or None without boto3, so that obstore searches itself."""
        if find_spec("boto3") is None:
            if self.profile:
                raise ConfigError(
                    "source.storage_options: profile needs boto3; install growcache[s3]",
                    code="GC801",
                )
            return None
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider

        try:
            if self._session.get_credentials() is not None:
                return Boto3CredentialProvider(self._session, ttl=_CREDENTIALS_TTL)
        except BotoCoreError as error:
            raise CredentialsError(
                f"no credentials for s3://{bucket}: {type(error).__name__}: {short_key(str(error))}"
            ) from None
        raise CredentialsError(
            f"no credentials for s3://{bucket}: set key and secret in source.storage_options, "
            "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or anon: true for a public bucket"
        )

    def region(self) -> str | None:
        for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
            if found := os.environ.get(name):
                return found
        return self._profile_section.get("region")

    def endpoint(self) -> str | None:
        if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
            return None
        for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if found := os.environ.get(name):
                return found
        section = self._profile_section
        if not section:
            return None
        # botocore's class for these variables is private, so they are read here.
        services = self._session.full_config.get("services", {})
        service = services.get(section.get("services"), {}).get("s3")
        own = service.get("endpoint_url") if isinstance(service, Mapping) else None
        return own or section.get("endpoint_url")

    @cached_property
    def _profile_section(self) -> Mapping[str, Any]:
        path = os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config"
        if find_spec("botocore") is None or not Path(path).expanduser().is_file():
            return {}
        section: Mapping[str, Any] = self._session.get_scoped_config()
        return section

    @cached_property
    def _session(self) -> Any:
        import botocore.session
        from botocore.exceptions import ProfileNotFound

        session = botocore.session.Session(profile=self.profile)
        try:
            session.get_scoped_config()
        except ProfileNotFound as error:
            raise ConfigError(
                f"source.storage_options: {error}; see ~/.aws/config", code="GC215"
            ) from None
        return session


_HOST_KEY_POLICIES = ("auto_add", "reject")  # fsspec's names
_ASYNCSSH_NAMES = {  # name in fsspec and paramiko -> name in asyncssh
    "port": "port",
    "username": "username",
    "password": "password",
    "passphrase": "passphrase",
    "timeout": "connect_timeout",
    "auth_timeout": "login_timeout",
    "banner_timeout": "login_timeout",
    "gss_auth": "gss_auth",
    "gss_kex": "gss_kex",
    "gss_host": "gss_host",
    "gss_deleg_creds": "gss_delegate_creds",
}
_OTHER_OPTIONS = ("key_filename", "look_for_keys", "allow_agent", "compress")


@dataclass(frozen=True)
class SshServer:
    host: str
    url: str
    settings: Mapping[str, Any] = field(repr=False)  # for asyncssh, secrets included
    rejects_unknown_hosts: bool
    stall_seconds: float  # a connection without an answer for this time is given up
    uses_agent_only: bool

    @property
    def identity(self) -> str:
        """The user on the host, because the files of two users are never the same objects."""
        user, port = self.settings.get("username", ""), self.settings.get("port", 22)
        return f"ssh://{user}@{self.host}:{port}"


def ssh_server(
    location: Location, url: str, storage_options: Mapping[str, Any], stall_seconds: float
) -> SshServer:
    options = dict(storage_options)
    policy = options.pop("host_key_policy", "auto_add")
    if policy not in _HOST_KEY_POLICIES:
        raise ConfigError(
            f"source.storage_options: expected a host_key_policy of {' or '.join(_HOST_KEY_POLICIES)}",
            code="GC215",
        )
    if unknown := sorted(set(options) - {*_ASYNCSSH_NAMES, *_OTHER_OPTIONS}):
        known = ", ".join(sorted({*_ASYNCSSH_NAMES, *_OTHER_OPTIONS, "host_key_policy"}))
        raise ConfigError(
            f"source {location.url}: its storage_options were refused: no option {unknown[0]!r}; "
            f"expected some of {known}",
            code="GC215",
        )
    host, address = _parse_ssh_address(url, location.url)
    options = {**address, **{k: v for k, v in options.items() if v is not None}}
    settings = {
        "connect_timeout": stall_seconds,
        "login_timeout": stall_seconds,
        **{_ASYNCSSH_NAMES[k]: v for k, v in options.items() if k in _ASYNCSSH_NAMES},
    }
    if "password" in options:
        settings.setdefault("passphrase", options["password"])
    if options.get("compress"):
        settings["compression_algs"] = ["zlib@openssh.com"]
    # Named keys, or else those of ~/.ssh/config and ~/.ssh.
    agent_only = False
    if (names := options.get("key_filename")) is not None:
        try:
            names = [names] if isinstance(names, str) else names
            settings["client_keys"] = [str(Path(name).expanduser()) for name in names]
        except TypeError as error:
            raise refused_ssh_options(location.root, error) from None
    elif not options.get("look_for_keys", True):
        settings["client_keys"] = None
        agent_only = bool(options.get("allow_agent", True))
    if not options.get("allow_agent", True):
        settings["agent_path"] = None
    is_strict = policy == "reject"
    return SshServer(host, location.root, settings, is_strict, stall_seconds, agent_only)


def refused_ssh_options(url: str, error: Exception) -> ConfigError:
    # The exception's text may hold secrets.
    return ConfigError(
        f"source {url}: its storage_options were refused ({type(error).__name__})", code="GC215"
    )


def _parse_ssh_address(url: str, shown: str) -> tuple[str, dict[str, Any]]:
    try:
        parsed = urlsplit(url)
        host, port = parsed.hostname, parsed.port
    except ValueError:
        host = port = None
    if not host:
        raise ConfigError(f"source.url {shown}: expected sftp://HOST/PATH", code="GC111")
    found = {
        "port": port,
        "username": parsed.username and unquote(parsed.username),
        "password": parsed.password and unquote(parsed.password),
    }
    return host, {name: value for name, value in found.items() if value is not None}


ServerAddress = tuple[str, str, int]

_DEFAULT_PORTS = {"http": 80, "https": 443}
# Headers that describe the request and the program, and identify no user.
_PUBLIC_HEADERS = frozenset({"accept", "accept-encoding", "accept-language", "user-agent"})


@dataclass(frozen=True)
class GuardedSession:
    origins: frozenset[ServerAddress]
    headers: frozenset[str]
    cookies: frozenset[str]
    authorizations: frozenset[str] = field(repr=False)  # header values
    checks_ranges: bool

    async def __call__(self, **options: Any) -> ClientSession:
        from aiohttp import ClientSession

        # A middleware costs a twentieth of a small read, so none is added without need.
        if self.headers or self.cookies or self.authorizations or self.checks_ranges:
            options["middlewares"] = (*options.get("middlewares", ()), self._send)
        return ClientSession(**options)

    async def _send(self, request: ClientRequest, handler: Handler) -> ClientResponse:
        # This may be the request that follows a redirect.
        url = request.url
        # The first comparison is fast. The second is of the address as it is sent, with
        # non-ASCII names encoded.
        origin = url.scheme, url.host, url.port
        if origin not in self.origins and server_address(str(url)) not in self.origins:
            self._remove_secrets(request.headers)
        response = await handler(request)
        if self.checks_ranges and response.status == 206:
            asked = request.headers.get("Range", "")
            if not is_requested_range(asked, response.headers.get("Content-Range", "")):
                from aiohttp import ClientPayloadError

                response.close()
                raise ClientPayloadError(f"another range than {asked}")
        return response

    def _remove_secrets(self, headers: Any) -> None:
        for name in self.headers:
            headers.popall(name, None)
        if headers.get("Authorization") in self.authorizations:
            headers.popall("Authorization")
        cookies = "; ".join(headers.popall("Cookie", ())).split("; ")
        kept = [one for one in cookies if one.partition("=")[0].strip() not in self.cookies]
        if any(kept):
            headers["Cookie"] = "; ".join(kept)


def guarded_session(
    addresses: Iterable[str], options: Mapping[str, Any], *, checks_ranges: bool
) -> GuardedSession:
    places = [options, options.get("client_kwargs") or {}]
    headers = {str(name).lower() for place in places for name in place.get("headers") or ()}
    cookies = {str(name) for place in places for name in place.get("cookies") or ()}
    users = {place["auth"].encode() for place in places if place.get("auth")}
    return GuardedSession(
        frozenset(map(server_address, addresses)),
        frozenset(headers - _PUBLIC_HEADERS),
        frozenset(cookies),
        frozenset(users),
        checks_ranges,
    )


def with_guarded_sessions(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    addresses = [part for part in url.split("::") if urlsplit(part).scheme in WEB_SCHEMES]
    made = dict(options)
    if addresses and "::" not in url:
        session = guarded_session(addresses, options, checks_ranges=False)
        return {"get_client": session, **made}
    for scheme in {urlsplit(address).scheme for address in addresses}:
        own = dict(options.get(scheme) or {})
        session = guarded_session(addresses, own, checks_ranges=True)
        made[scheme] = {"get_client": session, **own}
    return made


def server_address(address: str) -> ServerAddress:
    """Return scheme, host and port.

    >>> server_address("http://u:p@Lab.org/x"), server_address("https://lab.org:80/")
    (('http', 'lab.org', 80), ('https', 'lab.org', 80))
    """
    parts = urlsplit(address)
    return parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
